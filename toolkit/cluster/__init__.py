"""Job files for batch systems: what `toolkit job` checks and writes."""
