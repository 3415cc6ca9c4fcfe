-- Written by 0.1.0.
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body)
 VALUES (E'\\x22d85b250e7e4e4e4a6ea57d132a425bd52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', '2026-11-22 12:00:01+00', NULL, '1', '6', '200', 'completed', 'E/N8LwqOPOSh', 'bytes', E'\\x33dadfc434a55a616c60467279d61deb', '[["Content-Type", "image/x"], ["X-Two", "a"], ["X-Two", "b"]]', E'\\x00ff');
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body)
 VALUES (E'\\x4da35eb7de29cf5dc63334f9254e1e7bd52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', '2026-11-22 12:00:01+00', NULL, '1', '1', '500', 'failed', 'HCAZ9C27j+9A', 'failed', E'\\x636d21cab0048cae755a3bb1a3e18a4b', '"json"', E'\\x7b226661696c6564223a747275657d0a');
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body)
 VALUES (E'\\x91f446190ab306d56e7f0cd63dac082ed52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', NULL, '2026-11-22 12:01:00+00', '1', '1', NULL, 'in_progress', 'Ofq1bNCjRO8D', 'interrupted', E'\\x93151894da588e85ed6591aeac9510b9', NULL, NULL);
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body)
 VALUES (E'\\x56ff23e7a887e902ae8de2fdec1cc25fd52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', '2026-11-22 12:00:01+00', NULL, '1', '5', '201', 'completed', 'Ev+IbIYh6sw2', 'json', E'\\x5229c900e0811d89e6ec9ee0e5e98e3a', '"json"', E'\\x7b226964223a317d0a');
UPDATE idempotency_record SET steps = '{"step": {"attempt": 1, "at": "2026-11-22 12:00:00.000000", "result": "{\"\\u00fc\": [1, null]}"}}'
 WHERE key = E'\\x91f446190ab306d56e7f0cd63dac082ed52231cfd98026';
