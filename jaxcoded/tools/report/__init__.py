"""Analyse the telemetry of a job, in numbers and pictures."""
