"""The formats of bodies: forms, JSON, arrays and tables, read within limits; and their OpenAPI schemas."""
