"""Push to an OpenTelemetry collector: ``tierd --otlp URL``. Needs the extra ``tiering[otlp]``.

data.py  the metrics and the steps of a View as OpenTelemetry's metrics and spans
push.py  the thread that sends them
"""
