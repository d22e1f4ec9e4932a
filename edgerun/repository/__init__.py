"""Which models exist, where their files come from and whether they are whole."""
