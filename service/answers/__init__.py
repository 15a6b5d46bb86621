"""What the endpoints answer: one module for each, with its models and the function that makes them of a View."""
