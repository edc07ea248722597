"""Before anything runs: will it fit, what to pick, how fast will it be."""
