"""What several test folders use: models, rows, ranks, stand-ins and plain loops."""
