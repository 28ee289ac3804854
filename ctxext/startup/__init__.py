"""The folder that ``ctxext run`` puts on PYTHONPATH: every Python runs ``sitecustomize`` from there when it starts."""
