"""The sidecar: a process of its own that serves telemetry pages over HTTP. Knows neither engine nor torch."""
