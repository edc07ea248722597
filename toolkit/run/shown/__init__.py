"""What a run shows: summary, live report, last lines."""
