"""The way from a model and a configuration to the parts of an engine: sizes, plan, assembly."""
