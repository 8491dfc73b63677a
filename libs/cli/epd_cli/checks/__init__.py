"""What ``epd doctor`` looks at: each check judges facts that others gathered, and says what to do."""
