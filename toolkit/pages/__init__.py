"""What people look at: reports, the data page, tables, the model card."""
