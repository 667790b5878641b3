"""`kvroute demo`: recorded engines behind a real router, and the score of its predictions."""
