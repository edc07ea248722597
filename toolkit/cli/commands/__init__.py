"""The commands of `toolkit`, a file each."""
