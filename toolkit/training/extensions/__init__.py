"""What can be hung on the loop, and taken off."""
