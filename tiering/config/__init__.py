"""Internal: the native configuration, and ``ds_config/``, which reads it from a DeepSpeed file. No torch."""
