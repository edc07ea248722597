"""What one rank runs in a step: shapes of rows, images and units."""
