"""What the commands of the laboratory print, write and draw."""
