"""What the kinds of rows are: from columns to batches, a file for each."""
