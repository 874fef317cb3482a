"""What stands around every route: the guard, errors as problem responses, connections, a graceful shutdown."""
