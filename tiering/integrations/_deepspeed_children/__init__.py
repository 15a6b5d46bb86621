"""A directory for PYTHONPATH, in which Python finds sitecustomize.py when it starts."""
