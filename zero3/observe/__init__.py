"""Reports of a run: telemetry, progress lines, monitors, traces, and rates of the device."""
