"""The operation of the service: health, metrics, API keys and the audit log."""
