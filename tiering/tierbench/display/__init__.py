"""Output of results and of progress: tables, plots, JSON, CSV and Prometheus' text format."""
