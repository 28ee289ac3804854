"""Perplexity by named protocols and passkey retrieval, and the result record that both write.

Import from the modules: ``ctxext.evaluation.perplexity``, ``.passkey``, ``.results``, ``.metrics``.
"""
