"""HTTP: routes, request and answer models, the guard in front of them; the only package that knows FastAPI."""
