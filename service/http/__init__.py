"""HTTP: routes, their requests and responses, and the guard in front of them; the only package that uses FastAPI."""
