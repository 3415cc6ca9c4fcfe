-- Written by 0.1.0.
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body, request, tries, tried_at)
 VALUES (E'\\x22d85b250e7e4e4e4a6ea57d132a425bd52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', '2026-11-22 12:00:01+00', NULL, '1', '6', '200', 'completed', 'E/N8LwqOPOSh', 'bytes', E'\\x33dadfc434a55a616c60467279d61deb', '[["Content-Type", "image/x"], ["X-Two", "a"], ["X-Two", "b"]]', E'\\x00ff', NULL, NULL, NULL);
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body, request, tries, tried_at)
 VALUES (E'\\x4da35eb7de29cf5dc63334f9254e1e7bd52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', '2026-11-22 12:00:01+00', NULL, '1', '1', '500', 'failed', 'HCAZ9C27j+9A', 'failed', E'\\x636d21cab0048cae755a3bb1a3e18a4b', '"json"', E'\\x7b226661696c6564223a747275657d0a', NULL, NULL, NULL);
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body, request, tries, tried_at)
 VALUES (E'\\x91f446190ab306d56e7f0cd63dac082ed52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', NULL, '2026-11-22 12:01:00+00', '1', '1', NULL, 'in_progress', 'Ofq1bNCjRO8D', 'interrupted', E'\\x93151894da588e85ed6591aeac9510b9', NULL, NULL, E'\\x7b226d6574686f64223a2022504f5354222c2022626173655f75726c223a2022687474703a2f2f6c6f63616c686f73742f222c202270617468223a20222f696e746572727570746564222c20227175657279223a2022222c202268656164657273223a205b5b22436f6e74656e742d54797065222c20226170706c69636174696f6e2f6a736f6e225d2c205b22582d55736572222c2022616c696365225d2c205b224964656d706f74656e63792d4b6579222c2022696e746572727570746564225d5d7d0a7b22616d6f756e74223a20357d', NULL, NULL);
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body, request, tries, tried_at)
 VALUES (E'\\x56ff23e7a887e902ae8de2fdec1cc25fd52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', '2026-11-22 12:00:01+00', NULL, '1', '5', '201', 'completed', 'Ev+IbIYh6sw2', 'json', E'\\x5229c900e0811d89e6ec9ee0e5e98e3a', '"json"', E'\\x7b226964223a317d0a', NULL, NULL, NULL);
INSERT INTO idempotency_record
 (key, expires_at, created_at, completed_at, lease_expires_at, attempt, fingerprint_version, status, state, owner, name, fingerprint, headers, body, request, tries, tried_at)
 VALUES (E'\\x7fd637510f5d8383acca1f591e6b9fe1d52231cfd98026', '2126-11-22 12:00:00+00', '2026-11-22 12:00:00+00', NULL, '2026-11-22 12:01:00+00', '1', '1', NULL, 'in_progress', 'vX/S49KLrp07', 'resumed', E'\\x75b35dfb334f888f6b68008efd34fb4b', NULL, NULL, E'\\x7b226d6574686f64223a2022504f5354222c2022626173655f75726c223a2022687474703a2f2f6c6f63616c686f73742f222c202270617468223a20222f726573756d6564222c20227175657279223a2022222c202268656164657273223a205b5b22436f6e74656e742d54797065222c20226170706c69636174696f6e2f6a736f6e225d2c205b22582d55736572222c2022616c696365225d2c205b224964656d706f74656e63792d4b6579222c2022726573756d6564225d5d7d0a7b22616d6f756e74223a20357d', NULL, NULL);
INSERT INTO idempotency_record_step
 (key, name, attempt, created_at, result)
 VALUES (E'\\x91f446190ab306d56e7f0cd63dac082ed52231cfd98026', 'step', '1', '2026-11-22 12:00:00+00', E'\\x7b225c7530306663223a205b312c206e756c6c5d7d');
INSERT INTO idempotency_record_step
 (key, name, attempt, created_at, result)
 VALUES (E'\\x7fd637510f5d8383acca1f591e6b9fe1d52231cfd98026', 'step', '1', '2026-11-22 12:00:00+00', E'\\x7b225c7530306663223a205b312c206e756c6c5d7d');
