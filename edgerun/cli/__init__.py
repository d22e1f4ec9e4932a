"""What a person types: parses, prints, nothing else."""
