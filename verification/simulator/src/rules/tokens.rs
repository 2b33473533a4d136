//! Fencing tokens.

use super::{Checker, Hold, TOKENS, Violation, show};
use crate::redis::node;
use crate::stored::{self, StoredValue};
use std::collections::BTreeMap;

impl Checker {
    pub(super) fn check_tokens(&mut self) -> Result<(), Violation> {
        let greatest = self.tokens.last_key_value().map_or(0, |(token, _)| *token);
        self.new_holds.clear();
        let mut carried = BTreeMap::new();
        let mut seen: Vec<(Hold, u64)> = Vec::new();
        let mut older = None;
        node(|node| {
            let keys = (0..).zip(&node.dbs).flat_map(|(db, keys)| keys.keys().map(move |key| (db, key)));
            for (db, key) in keys.filter(|(db, key)| !self.written_by_others.contains(&(*db, (*key).clone()))) {
                let StoredValue::Lock(lock) = stored::read(node, db, key) else { continue };
                let newest = lock.holders.iter().filter_map(|it| it.token).max();
                if newest > lock.fence {
                    older = Some((db, key.clone(), newest, lock.fence));
                }
                carried.extend(lock.fence.map(|fence| ((db, key.clone()), fence)));
                // (Those that are over may exist again: if the clock is set back, or the key loses its expiry.)
                let StoredValue::Lock(lock) = stored::read_at(node, db, key, 0) else { continue };
                let tokens = lock.holders.into_iter().filter_map(|it| Some((it.owner, it.token?)));
                let tokens = tokens.filter(|(owner, token)| self.tokens.get(token).map(|(of, _)| of) != Some(owner));
                seen.extend(tokens.map(|(owner, token)| ((db, key.clone(), owner), token)));
            }
        });
        if let Some((db, key, newest, fence)) = older {
            let what = format!("{} in {db} carries {fence:?}, but a holder has {newest:?}", key.escape_ascii());
            return Err(Violation::new(TOKENS, what));
        }
        for (key, before) in &self.carried {
            // (A key that is rewritten after a clock step carries the tokens of its current holders.)
            if let Some(now) = carried.get(key).filter(|now| *now < before && !self.has_stepped) {
                let what = format!("{} carries {now} after {before}", key.1.escape_ascii());
                return Err(Violation::new(TOKENS, what));
            }
        }
        self.carried = carried;
        for (hold, token) in seen.into_iter().filter(|(_, token)| !self.fences.contains(token)) {
            match self.tokens.get(&token) {
                Some((of, _)) if *of != hold.2 => {
                    let what =
                        format!("token {token} of {} was granted to {}", of.escape_ascii(), hold.2.escape_ascii());
                    return Err(Violation::new(TOKENS, what));
                }
                // (A lease that had ended before the key was read may continue when the clock is set back.)
                None if token <= greatest && !self.has_stepped => {
                    return Err(Violation::new(TOKENS, format!("{} got token {token} after {greatest}", show(&hold))));
                }
                _ => {
                    self.tokens.insert(token, (hold.2.clone(), self.position));
                    if !self.current_requesters.contains(&hold.2) {
                        self.queued.insert(token, hold.2.clone());
                    }
                    self.new_holds.push((hold, token));
                }
            };
        }
        Ok(())
    }
}
