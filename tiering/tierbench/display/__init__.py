"""What is shown of a result, and while it is measured: for people, programs and Prometheus."""
