"""Spans of time that members record for ``psdist trace``, and for OpenTelemetry."""
