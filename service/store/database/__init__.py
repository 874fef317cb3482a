"""SQLite or PostgreSQL: connections and transactions, migrations, waiting for changes."""
