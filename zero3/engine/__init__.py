"""The engine: forward, backward and step of a training loop, parameters by name, and files."""
