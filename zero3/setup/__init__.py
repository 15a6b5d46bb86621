"""Makes the parts of an engine from a model and a configuration: sizes, plan, assembly."""
