"""What every part of epdflow shares: protocol, bus, store, ingest, client, settings, telemetry."""
