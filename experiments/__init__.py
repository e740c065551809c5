"""One folder for each table or figure of the papers; what they share is here."""
