"""What a Prometheus and a Grafana beside the sidecar want: a dashboard, and alert rules with their tests."""
