"""The search for a method and its settings: what may be tried, how a setting is judged, and the study of all trials."""
