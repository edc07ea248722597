"""Parts of pages: charts, tables, numbers."""
