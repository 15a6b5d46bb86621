"""Groups of parameters: layout, storage, sharding, and precision."""
