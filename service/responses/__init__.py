"""Response bodies: one module per endpoint or group of endpoints, with its models and the function that fills them."""
