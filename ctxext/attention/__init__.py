"""Attention for methods that change which relative position, or which frequencies, a score sees."""
