"""What this machine is, and which execution provider each kind of model gets."""
