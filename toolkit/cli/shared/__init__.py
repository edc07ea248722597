"""What several commands share: arguments, tables and errors, the hub."""
