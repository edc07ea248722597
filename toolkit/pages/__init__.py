"""Pages and tables for people: reports, the data page, console tables, the model card."""
