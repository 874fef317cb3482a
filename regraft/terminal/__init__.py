"""What all commands use: their options, output for people and for programs, and the ways in which they end."""
