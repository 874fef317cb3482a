"""PostgreSQL with pgvector as a remote engine; imports psycopg, an extra, so it is imported only where it is used."""
