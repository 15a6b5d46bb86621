"""What is between a socket and the application: where tierd listens, and whom it answers."""
