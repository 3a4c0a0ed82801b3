"""What is checked of hosts before a run uses them: ports, the way to each other, shared files."""
