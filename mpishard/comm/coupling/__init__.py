"""Links between the programs of a job: how they meet, and what they send."""
