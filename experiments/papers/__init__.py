"""Results of papers, one module each."""
