"""What a person decides: knowledge entries and parked patches, in the terminal and in the browser."""
